"""Terms of a step: what makes it longer or shorter, and by how much."""

from dataclasses import replace

import pytest

from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.predict import Prediction
from deepspeed_compress.planner.search import critical_batch, extra_tokens, loss_gap
from deepspeed_compress.planner.traffic import ISSUE
from tests.planner.jobs import LLAMA_7B, LLAMA_70B, TOY, job, layout


def seconds(prediction: Prediction, name: str) -> float:
    return sum(term.seconds for term in prediction.terms if term.name == name)


def test_the_terms_add_up_to_the_step() -> None:
    prediction = job().predict(layout(zero=2, gradient_bits=4, weight_bits=4))
    assert prediction.seconds == pytest.approx(sum(term.seconds for term in prediction.terms))
    assert sum(map(prediction.share, {term.kind for term in prediction.terms})) == pytest.approx(1.0)
    assert prediction.interval[0] < prediction.seconds < prediction.interval[1]
    assert all(term.formula and term.source for term in prediction.terms)


def test_recomputation_costs_a_forward_pass() -> None:
    """A forward pass is a third of the products of a step, except those of the head, which are not repeated."""
    none, full = (job().predict(layout(recompute=kind)) for kind in ("none", "full"))
    ratio = seconds(full, "matrix products") / seconds(none, "matrix products")
    assert ratio == pytest.approx(4 / 3, rel=0.02)
    assert full.memory.activations < none.memory.activations / 5


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fewer_bits_send_fewer_bytes(zero: int) -> None:
    predictions = [job().predict(layout(zero=zero, gradient_bits=bits)) for bits in (0, 8, 4, 3)]
    sent = [sum(term.outside for term in prediction.terms if term.name == "gradients") for prediction in predictions]
    assert sent == sorted(set(sent), reverse=True)


@pytest.mark.parametrize(("gpus", "times"), [("64xH100", [2, 2, 2, 1]), ("64xCPU", [2, 2, 2, 2])])
def test_uncompressed_gradients_travel_twice_unless_nccl_sends_them_to_owners(gpus: str, times: list[int]) -> None:
    cluster = job(gpus)
    whole = cluster.model.parameters * cluster.cluster.gpu.element * 63 / 64
    sent = []
    for zero in range(4):
        terms = cluster.predict(layout(zero=zero, accumulation=1)).terms
        sent += [term.inside + term.outside for term in terms if term.name == "gradients"]
    assert [size / whole for size in sent] == pytest.approx(times)


@pytest.mark.parametrize(("zero", "name"), [(1, "updated weights"), (3, "gathered weights")])
@pytest.mark.parametrize(("ranks", "exact", "times"), [("64xH100", 16, 1.0), ("64xCPU", 32, 8 * 56 / 63)])
def test_nccl_brings_compressed_weights_into_a_node_once(
    zero: int, name: str, ranks: str, exact: int, times: float
) -> None:
    """A ring brings them into a node of eight once. With gloo, they go straight to every rank."""
    sent = []
    for bits in (0, 8):
        weights = layout(zero=zero, accumulation=1, weight_bits=bits)
        terms = job(ranks, "100gbit", per_node=8).predict(weights).terms
        sent += [term.outside for term in terms if term.name == name]
    assert sent[1] / sent[0] == pytest.approx(times * 8.125 / exact, rel=0.01)


def test_deepspeed_waits_for_gloo_but_compressed_gradients_hide() -> None:
    hidden = []
    for bits in (0, 4):
        terms = job("64xCPU").predict(layout(zero=2, gradient_bits=bits)).terms
        hidden += [term.busy - term.seconds for term in terms if term.name == "gradients"]
    assert hidden[0] == 0.0
    assert hidden[1] > 0.0


def test_the_cpu_issues_a_compressed_bucket_once_for_all_peers() -> None:
    """The GPU waits for it only where the CPU is slow."""
    name, nodes = "issuing compressed buckets", (2, 16)
    small = [layout(zero=2, data=8 * count, gradient_bits=4, accumulation=1) for count in nodes]
    slow = Constants(cpu=100.0)
    steps = [
        job(f"{8 * count}xH100", "100gbit", model=TOY, per_node=8, constants=slow).predict(one)
        for count, one in zip(nodes, small, strict=True)
    ]
    waits = [seconds(step, name) for step in steps]
    busy = [sum(term.busy for term in step.terms if term.name == name) for step in steps]
    issue = slow.cpu * ISSUE
    assert busy == pytest.approx([issue * round(busy[0] / issue)] * 2)
    assert 0.0 < waits[0] == waits[1] <= busy[1]
    large = job(model=LLAMA_7B).predict(layout(zero=2, gradient_bits=4))
    assert seconds(large, name) == 0.0
    assert not [term for term in job().predict(layout(zero=2)).terms if term.name == name], "uncompressed"


def test_a_pipeline_sums_a_tied_embedding_between_two_stages() -> None:
    for tied in (False, True):
        terms = job(model=replace(LLAMA_70B, tied=tied)).predict(layout(data=32, pipeline=2)).terms
        assert [term.outside for term in terms if term.name == "tied embedding"] == [2 * 128256 * 8192] * tied


def test_few_ranks_own_a_tied_embedding_which_stays_uncompressed() -> None:
    """Of two replicas, one owns the whole table, and receives it, as both would without compression."""
    small, both = job("4xCPU", model=TOY), {"data": 2, "pipeline": 2, "accumulation": 16}
    plain, ours = (
        next(term for term in small.predict(layout(**both, weight_bits=bits)).terms if term.name == "updated weights")
        for bits in (0, 4)
    )
    assert ours.outside < 0.6 * plain.outside
    assert ours.busy > 0.8 * plain.busy


def test_hybrid_sharding_keeps_weights_inside_nodes() -> None:
    everywhere, inside = (job().predict(layout(zero=3, shard_within=size)) for size in (0, 8))
    on_network = [sum(term.outside for term in one.terms if "weights" in term.name) for one in (everywhere, inside)]
    assert on_network[0] > 0 == on_network[1]
    assert inside.seconds < everywhere.seconds
    assert inside.memory.states > everywhere.memory.states


def test_a_pipeline_is_idle_while_it_fills() -> None:
    few, many = (job(model=LLAMA_70B).predict(layout(data=8, pipeline=8, accumulation=count)) for count in (8, 128))
    assert few.share("bubble") > 0.3
    assert many.share("bubble") < 0.06


def test_a_stage_of_70b_does_not_fit_without_sharding() -> None:
    memory = job(model=LLAMA_70B).memory(layout(zero=1))
    assert memory.verdict(85e9) == "does not fit"
    assert job(model=LLAMA_70B).memory(layout(zero=3, recompute="full")).verdict(85e9) == "fits"


def test_states_follow_the_zero_stage() -> None:
    """1910.02054, figure 1: 2 + 2 + 12 bytes per parameter. Without ZeRO, DeepSpeed keeps fp32 gradients, too."""
    states = [job().memory(layout(zero=zero)).states / job().model.parameters for zero in range(4)]
    assert states == pytest.approx([20, 4 + 12 / 64, 2 + 14 / 64, 16 / 64], rel=0.01)


def test_a_gap_in_loss_becomes_tokens() -> None:
    assert extra_tokens(0.001, 7e9, 140e9) == pytest.approx(0.025, rel=0.05)
    assert extra_tokens(0.0, 7e9, 140e9) == 0.0


def test_islands_lose_less_in_larger_models() -> None:
    assert loss_gap(layout(islands=2), 10.5e6) == pytest.approx(0.009, abs=0.001)
    assert loss_gap(layout(islands=4), 10.5e6) == pytest.approx(0.023, abs=0.001)
    assert loss_gap(layout(islands=8), 20e9) == 0.0
    assert loss_gap(layout(gradient_bits=4, weight_bits=4), 1e9) == pytest.approx(0.0004)
    assert loss_gap(layout(zero=3, weight_bits=4), 1e9) == pytest.approx(0.0043)


def test_the_critical_batch_grows_with_the_data() -> None:
    assert 10e6 < critical_batch(300e9) < 30e6


def test_a_single_message_cannot_hide() -> None:
    small = job(model=TOY)
    [gathered] = [one for one in small.predict(layout(zero=3, data=64)).terms if one.name == "gathered weights"]
    assert gathered.seconds == gathered.busy


def test_islands_divide_the_bytes_by_the_steps_between_exchanges() -> None:
    often, rarely = (job().predict(layout(zero=1, islands=8, sync_every=every)) for every in (10, 30))
    assert seconds(often, "islands") == pytest.approx(3 * seconds(rarely, "islands"))


def test_the_last_stage_is_the_fullest_if_its_logits_are() -> None:
    """The first stage keeps more activations, unless they are computed again."""
    few, many = (replace(LLAMA_70B, vocab=vocab) for vocab in (32000, 512000))
    one = layout(tensor=8, data=2, pipeline=4, micro=4, accumulation=1, recompute="full", engine="megatron")
    logits = [job(model=model).memory(one).logits for model in (few, many)]
    assert logits[0] == 0.0 < logits[1]


def test_cpus_hold_everything_in_fp32() -> None:
    states = [job("64xCPU").memory(layout(zero=zero)).states / LLAMA_7B.parameters for zero in range(4)]
    assert states == pytest.approx([16, 8 + 12 / 64, 4 + 16 / 64, 20 / 64], rel=0.01)
    half, full = (job(gpus).memory(layout(zero=3)) for gpus in ("64xA100", "64xCPU"))
    assert 1.5 * half.activations < full.activations <= 2 * half.activations
