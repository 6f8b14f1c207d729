"""The only code that communicates: compressed reduce-scatter and all-reduce of flat buckets."""

from deepspeed_compress.reducers.exchange import exchange
from deepspeed_compress.reducers.payload import Encoder, PayloadReducer, StepClock
from deepspeed_compress.reducers.plan import Piece, Plan, make_plan
from deepspeed_compress.reducers.probe import cosine_with_truth, true_sum

__all__ = [
    "Encoder",
    "PayloadReducer",
    "Piece",
    "Plan",
    "StepClock",
    "cosine_with_truth",
    "exchange",
    "make_plan",
    "true_sum",
]
