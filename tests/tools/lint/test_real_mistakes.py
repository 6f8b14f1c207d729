"""Mistakes that users reported, and what is right in public configurations and must not be called wrong."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.lint.files import Search, sources
from deepspeed_compress.tools.lint.fixes import apply
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import lint_document, lint_text
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import Selection

HF: dict[str, Any] = {"framework": "hf"}
ACCELERATE: dict[str, Any] = {"framework": "accelerate"}
ZERO_2: dict[str, Any] = {"zero_optimization": {"stage": 2}}
AUTO: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
BATCH = {"train_batch_size": 8}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
SECTION = {"gradients": {"method": "blockwise", "bits": 4}}


def codes(config: dict[str, Any] | str, context: dict[str, Any] | None = None) -> list[str]:
    text = config if isinstance(config, str) else json.dumps(config, indent=1)
    return [finding.code for finding in lint_text(text, context=Context(**context or {}))]


def only(config: dict[str, Any] | str, context: dict[str, Any] | None = None) -> Diagnostic:
    text = config if isinstance(config, str) else json.dumps(config, indent=1)
    [finding] = lint_text(text, context=Context(**context or {}))
    return finding


def in_directory(directory: Path) -> list[Diagnostic]:
    """What is found in all configurations of a directory."""
    found = sources([str(directory)], Search(), io.BytesIO())
    return [
        finding
        for source in found
        for finding in lint_document(
            source.document, Context(source.world_size, framework=source.framework), Selection()
        )
    ]


@pytest.mark.parametrize(
    ("config", "context"),
    [
        pytest.param(BATCH | {"bf16": {"enabled": True}, "tensorboard": {"enabled": "0"}}, {}, id="zero-as-text"),
        pytest.param(
            AUTO | ADAMW | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "autotuning": {"enabled": True}},
            HF,
            id="the-autotuner-adds-zero",
        ),
        pytest.param(ZERO_2, {"framework": "lightning"}, id="lightning-adds-batch-sizes"),
        pytest.param(
            BATCH | ADAMW | {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
            {},
            id="autocast-of-a-16-bit-model",
        ),
        pytest.param(
            BATCH
            | {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "torch_adam": True}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            {},
            id="torch-adam-on-purpose",
        ),
        pytest.param(AUTO | ZERO_2 | {"bf16": {"enabled": True}}, HF, id="a-file-for-bf16"),
        pytest.param(
            AUTO | ZERO_2 | {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
            HF,
            id="defaults-of-the-trainer",
        ),
        pytest.param(
            AUTO | ZERO_2 | {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
            HF,
            id="a-section-that-asks-for-nothing",
        ),
        pytest.param(
            BATCH | {"scheduler": {"type": "StepLR", "params": {"step_size": 10}}} | ADAMW, {}, id="torch-without-zero"
        ),
        pytest.param(
            BATCH | ADAMW | {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50000000}},
            {"gpu_memory": 16 * 2**30},
            id="small-buffers",
        ),
        pytest.param(BATCH | {"wandb": {"enabled": True, "group": "FIRST_RUN"}}, {}, id="a-name-in-capitals"),
        pytest.param(
            BATCH | {"autotuning": {"enabled": True}, "zero_optimization": {"stage": [0, 1, 2]}},
            {},
            id="stages-that-the-autotuner-tries",
        ),
        pytest.param(
            BATCH
            | {
                "activation_checkpointing": {
                    "partition_activations": True,
                    "contiguous_memory_optimization": True,
                }
            },
            {},
            id="checkpoints-that-the-program-counts",
        ),
        pytest.param(
            BATCH | {"optimizer": {"type": "Adam", "params": {"lr": 0.0001, "weight_decay": 3e-7}}},
            {},
            id="a-decay-that-is-not-felt",
        ),
        pytest.param(
            BATCH
            | ADAMW
            | {
                "zero_optimization": {
                    "stage": 2,
                    "sub_group_size": 1e9,
                    "stage3_max_live_parameters": 1e9,
                    "stage3_prefetch_bucket_size": "auto",
                    "stage3_gather_16bit_weights_on_model_save": True,
                }
            },
            {},
            id="defaults-of-stage-3",
        ),
        pytest.param(
            BATCH | {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 1000, "hysteresis": 2}},
            {},
            id="defaults-of-a-dynamic-scale",
        ),
    ],
)
def test_what_is_right_is_not_called_wrong(config: dict[str, Any], context: dict[str, Any]) -> None:
    assert [code for code in codes(config, context) if code not in ("DSC012", "DSC010")] == []


def test_zero_as_text_is_a_number() -> None:
    """It was taken for a text that says nothing, as its truth is that of no number."""
    offload = {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": "0"}}
    assert codes(BATCH | ADAMW | {"zero_optimization": offload}) == ["DSC012"]


def test_batch_sizes_may_come_from_a_program() -> None:
    """Files without any are made complete by Lightning or a template: an error only where the reader is known."""
    found = only(ADAMW | ZERO_2)
    assert (found.code, found.severity) == ("DSC210", "warning")
    assert codes(ADAMW | ZERO_2, {"framework": "deepspeed"}) == ["DSC202"]


def test_a_file_of_another_program_is_one_finding() -> None:
    others = {f"num-{word}-layers": 1 for word in "abcdefghijklmnop"} | {"pipe-parallel-size": 1, "learning_rate": 1}
    found = only(BATCH | others | {"num_workers": 2})
    assert (found.code, "11 more" in found.message) == ("DSC100", True)


def test_activation_checkpointing_only_warns() -> None:
    """A program starts with it: what fails is a call that most programs do not make."""
    found = only(BATCH | {"activation_checkpointing": {"contiguous_memory_optimization": True}})
    assert (found.code, found.severity) == ("DSC818", "warning")


def test_a_pipeline_under_the_trainer_has_no_effect() -> None:
    found = only(AUTO | ZERO_2 | {"pipeline": {"stages": 2, "activation_checkpoint_interval": "1"}}, HF)
    assert (found.code, found.severity, found.fix) == ("DSC717", "warning", None)


TEMPLATE = """{
  "train_batch_size": GBSIZE,
  "train_micro_batch_size_per_gpu": CONFIG_MBSIZE,
  "prescale_gradients": PRESCALE_GRAD,
  "zero_optimization": {"stage": "ZERO_STAGE"},
  "curriculum_learning": {"enabled": false}
}
"""
BROKEN_TEMPLATE = '{"train_batch_size": {{ batch }}, "fp16": {"enabled": ${FP16}},\n"amp": {}, "x": \n'


def test_a_template_has_one_hint_and_what_does_not_depend_on_it() -> None:
    found = lint_text(TEMPLATE)
    assert [finding.code for finding in found] == ["DSC006", "DSC114"]
    assert found[0].severity == "info"
    assert "3 more" in found[0].message
    assert codes(BROKEN_TEMPLATE) == ["DSC006"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (BATCH | {"zero_optimization": {"stage": "two"}}, "DSC400"),
        (BATCH | {"zero_optimization": {"stage": 2.5}}, "DSC400"),
        (BATCH | {"zero_optimization": {"stages": 2, "overlap_comm": True}}, "DSC101"),
        (
            BATCH | {"zero_optimization": {"stage": 0, "profile_step": 1, "module_depth": -1, "top_modules": 1}},
            "DSC103",
        ),
        (BATCH | {"profile_step": 1, "module_depth": -1, "top_modules": 1}, "DSC102"),
        (BATCH | {"compile": {"enabled": True, "backend": "inductor"}}, "DSC101"),
        (BATCH | {"mine": 1, "yours": 2}, "DSC100"),
        (
            BATCH
            | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            | {"zero_optimization": {"stage": 2, "zero_allow_untested_optimizer": True}},
            "DSC103",
        ),
        (BATCH | {"bf16": {"enable": True}}, "DSC101"),
    ],
)
def test_one_mistake_is_one_finding(config: dict[str, Any], code: str) -> None:
    assert only(config).code == code


def test_only_what_the_trainer_calculates_is_doubtful() -> None:
    """What is an argument of the Trainer is given there too; a mismatch of the rest depends on ranks and data."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.0002, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}}
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    assert codes({**batch, "optimizer": optimizer, **ZERO_2}, HF) == []
    assert codes({**batch, "train_batch_size": 64, **ZERO_2}, HF) == ["DSC712"]


@pytest.mark.parametrize(
    ("config", "context", "code", "severity"),
    [
        ({"train_micro_batch_size_per_gpu": "auto", **ZERO_2}, HF, "DSC716", "warning"),
        ({"train_micro_batch_size_per_gpu": 1, **ZERO_2}, ACCELERATE, "DSC716", "warning"),
        (BATCH | {"fp16": {"enabled": False, "auto_cast": True}}, {}, "DSC314", "warning"),
        (BATCH | {"fp16": {"enabled": False, "auto_cast": True}, "bf16": {"enabled": True}}, {}, "DSC314", "warning"),
        (
            BATCH | ADAMW | ZERO_2 | {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}},
            {},
            "DSC533",
            "error",
        ),
        (
            BATCH | ADAMW | {"bf16": {"enabled": True}, "scheduler": {"type": "StepLR", "params": {"step_size": 1}}},
            {},
            "DSC533",
            "error",
        ),
        (
            AUTO | ZERO_2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            HF,
            "DSC718",
            "warning",
        ),
        (AUTO | ZERO_2 | {"activation_checkpointing": {"partition_activations": True}}, HF, "DSC717", "warning"),
        (
            BATCH | ADAMW | {"zero_optimization": {"stage": 2, "overlap_comm": True}},
            {"gpu_memory": 16 * 2**30},
            "DSC424",
            "warning",
        ),
        (AUTO | ZERO_2 | {"fp16": {"enabled": "true"}}, HF, "DSC715", "error"),
        (AUTO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "Auto"}}, HF, "DSC703", "error"),
        (AUTO | {"zero_optimization": {"stage": "AUTO"}}, HF, "DSC703", "error"),
        (AUTO | ZERO_2 | {"train_micro_batch_size_per_gpu": "Auto"}, HF, "DSC703", "error"),
        (json.dumps(AUTO | ZERO_2)[:-1] + ",}", HF, "DSC004", "error"),
        (
            BATCH | ADAMW | {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 0}}},
            {},
            "DSC532",
            "error",
        ),
        (AUTO | ZERO_2 | {"deepspeed_compress": {"gradients": {"method": "demo"}}}, HF, "DSC720", "warning"),
        (
            AUTO
            | {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, **ZERO_2}
            | {"deepspeed_compress": {"gradients": {"method": "dgc"}}},
            HF,
            "DSC720",
            "warning",
        ),
        (
            AUTO
            | {"train_batch_size": "auto", "deepspeed_compress": SECTION}
            | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
            HF,
            "DSC719",
            "info",
        ),
    ],
)
def test_what_was_missed_is_found_once(
    config: dict[str, Any] | str, context: dict[str, Any], code: str, severity: str
) -> None:
    # A section of ours under Hugging Face has a note of its own.
    assert [found for found in codes(config, context) if found != "DSC911"] == [code]
    assert {rule.severity for rule in RULES if rule.code == code} == {severity}


def test_adam_is_adamw_in_the_trainer_too() -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": 0.1}}}
    assert codes(AUTO | ZERO_2 | adam, HF) == []
    assert "DSC509" in codes(BATCH | ZERO_2 | adam)


def test_a_file_for_inference_has_another_tensor_parallel() -> None:
    inference = {"replace_method": "auto", "tensor_parallel": {"enabled": True, "tp_size": 2}, "dtype": "fp16"}
    assert codes(AUTO | ZERO_2 | inference, HF) == ["DSC104"]
    assert codes(BATCH | {"tensor_parallel": {"enabled": True}}) == ["DSC101"]


def test_words_that_nobody_fills_in_are_one_finding() -> None:
    block = {"stage": 2, "sub_group_size": "auto", "allgather_bucket_size": "auto"}
    found = only(AUTO | {"zero_optimization": block}, HF)
    assert found.code == "DSC702"
    assert "sub_group_size, zero_optimization.allgather_bucket_size" in found.message


def test_hjson_under_hugging_face_is_one_finding_a_kind() -> None:
    text = json.dumps(AUTO | ZERO_2, indent=1).replace("{", "{ // one", 1).replace('"stage"', "// two\n'stage'")
    assert codes(text, HF) == ["DSC004", "DSC004"]
    assert codes(text) == []


@pytest.mark.parametrize(
    ("config", "code", "result"),
    [
        (BATCH | {"compress": SECTION}, "DSC100", BATCH | {"deepspeed_compress": SECTION}),
        (BATCH | {"deepspeed-compress": SECTION}, "DSC100", BATCH | {"deepspeed_compress": SECTION}),
        (BATCH | {"fast": SECTION}, "DSC100", BATCH | {"deepspeed_compress": SECTION}),
        (
            BATCH | {"zero_optimization": {"stage": 1, "deepspeed_compress": SECTION}},
            "DSC103",
            BATCH | {"zero_optimization": {"stage": 1}, "deepspeed_compress": SECTION},
        ),
        (
            BATCH | {"zero_optimization": {"stage": 1, "compression": SECTION}},
            "DSC103",
            BATCH | {"zero_optimization": {"stage": 1}, "deepspeed_compress": SECTION},
        ),
        (BATCH | SECTION, "DSC102", BATCH | {"deepspeed_compress": SECTION}),
        # The method is the default.
        (
            BATCH | {"gradients": {"bits": 4}},
            "DSC102",
            BATCH | {"deepspeed_compress": {"gradients": {"bits": 4}}},
        ),
    ],
)
def test_our_section_is_renamed_or_moved_not_removed(config: dict[str, Any], code: str, result: dict[str, Any]) -> None:
    found = only(config)
    assert found.code == code
    assert "rename" in found.remedy or "move" in found.remedy
    assert "remove" not in found.remedy
    assert found.fix is not None
    text = json.dumps(config, indent=1)
    for edit in sorted(found.fix.edits, key=lambda edit: edit.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    assert json.loads(text) == result


LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 2\n"


def test_what_accelerate_drops_is_said_and_not_examined(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        LAUNCH + "deepspeed_config:\n  zero_stage: 2\n  optimizer: {type: NoSuch, params: {}}\n"
        "  train_micro_batch_size_per_gpu: 0\n  zero_force_ds_cpu_optimizer: false\n"
    )
    found = in_directory(tmp_path)
    assert [(finding.code, finding.place.start[0]) for finding in found] == [("DSC731", 5)]
    for key in ("optimizer", "train_micro_batch_size_per_gpu", "zero_force_ds_cpu_optimizer"):
        assert key in found[0].message


@pytest.mark.parametrize(("beside", "line"), [("  zero_stage: 3\n", 5), ("mixed_precision: bf16\n", 5)])
def test_settings_beside_a_file_are_refused(tmp_path: Path, beside: str, line: int) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO | ZERO_2))
    (tmp_path / "a.yaml").write_text(LAUNCH + f"deepspeed_config:\n  deepspeed_config_file: ds.json\n{beside}")
    [found] = in_directory(tmp_path)
    assert (found.code, found.severity, found.place.start[0]) == ("DSC730", "error", line)


def test_a_file_above_is_found(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()  # both are in one project
    (tmp_path / "configs").mkdir()
    (tmp_path / "launch" / "deep").mkdir(parents=True)
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(BATCH))
    (tmp_path / "launch" / "deep" / "a.yaml").write_text(
        LAUNCH + "deepspeed_config:\n  deepspeed_config_file: configs/ds.json\n"
    )
    assert {finding.code for finding in in_directory(tmp_path / "launch")} == {"DSC710", "DSC716"}


def test_a_file_that_is_missing_is_no_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(LAUNCH + "deepspeed_config:\n  deepspeed_config_file: no.json\n")
    [found] = in_directory(tmp_path)
    assert (found.code, found.severity, found.place.start) == ("DSC732", "warning", (4, 26))


SECTIONS = sorted(
    (*section.path, name)
    for section in keys().sections.values()
    for name, key in section.keys.items()
    if "object" in key.kinds and {*key.kinds} <= {"object", "null"} and name not in ("inference", "msamp")
)


@pytest.mark.parametrize("value", [True, 2, "cpu", []], ids=repr)
@pytest.mark.parametrize("path", SECTIONS, ids="/".join)
def test_a_plain_value_in_the_place_of_any_section_is_found(path: tuple[str, ...], value: object) -> None:
    """DeepSpeed refuses it, but for "zero_optimization": true, which has a rule of its own."""
    data: object = value
    for key in reversed(path):
        data = {key: data}
    assert isinstance(data, dict)
    found = lint_text(json.dumps({"train_batch_size": 8, **data}), context=Context(framework="deepspeed"))
    assert any(one.code in ("DSC018", "DSC120") and one.place.path == path for one in found)


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        (("zero_optimization", "offload_optimizer"), "cpu", {"device": "cpu"}),
        (("zero_optimization", "offload_optimizer"), True, {"device": "cpu"}),
        (("zero_optimization", "offload_param"), "nvme", {"device": "nvme"}),
        (("zero_optimization",), 2, {"stage": 2}),
        (("optimizer",), "AdamW", {"type": "AdamW"}),
        (("scheduler",), "WarmupLR", {"type": "WarmupLR"}),
        (("fp16",), True, {"enabled": True}),
        (("bf16",), False, {"enabled": False}),
    ],
)
def test_a_plain_value_is_corrected_to_the_key_that_it_is_meant_for(
    path: tuple[str, ...], value: object, meant: object
) -> None:
    data: object = value
    for key in reversed(path):
        data = {key: data}
    document = parse(json.dumps(data))
    fixed = apply(document, lambda one: lint_document(one, Context(), Selection(("DSC018",))), unsafe=True)
    assert fixed.document.get(*path) == meant


@pytest.mark.parametrize("section", ["fp16", "bf16", "optimizer", "scheduler", "flops_profiler"])
def test_auto_in_the_place_of_a_section_is_found_whoever_reads_the_file(section: str) -> None:
    text = json.dumps({"train_batch_size": 8, section: "auto", "zero_optimization": {"stage": 0}})
    for framework, code in ((None, "DSC018"), ("lightning", "DSC018"), ("deepspeed", "DSC700"), ("hf", "DSC702")):
        codes = [one.code for one in lint_text(text, context=Context(framework=framework))]
        assert code in codes
        assert len({"DSC018", "DSC700", "DSC702"} & {*codes}) == 1


@pytest.mark.parametrize(
    ("name", "params", "found"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.001}, "DSC529"),
        ("WarmupLR", {"warmup_max_lr": [0.001, 0.002]}, "DSC529"),
        ("WarmupLR", {"warmup_num_steps": 10}, None),
        ("WarmupDecayLR", {"warmup_max_lr": 0.001, "total_num_steps": 2000}, "DSC529"),
        ("WarmupDecayLR", {"total_num_steps": 2000}, "DSC528"),
        ("WarmupCosineLR", {"total_num_steps": 2000}, None),
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.002}, "DSC529"),
        ("OneCycle", {"cycle_min_lr": 0.00001, "cycle_max_lr": 0.0001}, None),
        ("OneCycle", {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001}, None),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.001}, "DSC529"),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.0001}, None),
        ("LRRangeTest", {}, "DSC528"),
        ("OneCycleLR", {"max_lr": 0.01, "total_steps": 100}, "DSC529"),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.02}, "DSC529"),
    ],
)
def test_schedules_that_replace_the_rate_of_the_optimizer(
    name: str, params: dict[str, object], found: str | None
) -> None:
    scheduler = {"scheduler": {"type": name, "params": params}}
    assert codes({**BATCH, **ADAMW, **scheduler}) == ([found] if found else [])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.002}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.001}),
        ("LRRangeTest", {}),
        ("WarmupDecayLR", {"total_num_steps": 2000, "warmup_num_steps": 2}),
    ],
)
def test_deepspeed_replaces_the_rate_of_the_optimizer(name: str, params: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules
    from torch import nn, optim

    rates = []
    for rate in (0.1, 0.01):
        optimizer = optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate)
        scheduler = getattr(lr_schedules, name)(optimizer, **params)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] != 0.1


def test_clipping_with_accelerate_is_a_number() -> None:
    """Accelerate fills in 1.0 for "auto", whatever clip_grad_norm_ is given."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    finding = only(config, ACCELERATE)
    assert (finding.code, "auto" in finding.remedy.partition("(")[0]) == ("DSC716", False)
    assert finding.fix is not None
    assert '"gradient_clipping": 1.0' in finding.fix.edits[0].text
    finding = only(config, HF)
    assert finding.fix is not None
    assert '"gradient_clipping": "auto"' in finding.fix.edits[0].text
