"""The only code that communicates: compressed reduce-scatter, all-reduce and all-gather of flat buckets."""

from deepspeed_compress.reducers.clipping import ClippingReducer
from deepspeed_compress.reducers.contracts import (
    Delivery,
    Done,
    Landing,
    Memory,
    Messages,
    Pending,
    Reducer,
    StepClock,
)
from deepspeed_compress.reducers.exchange import exchange, start_exchange
from deepspeed_compress.reducers.gather import DifferenceGather
from deepspeed_compress.reducers.link import link_seconds
from deepspeed_compress.reducers.payload import PayloadReducer
from deepspeed_compress.reducers.plan import Piece, Plan, make_plans
from deepspeed_compress.reducers.powersgd import PowerSGDReducer
from deepspeed_compress.reducers.probe import cosine_with_truth, true_sum
from deepspeed_compress.reducers.two_level import TwoLevelReducer

__all__ = [
    "ClippingReducer",
    "Delivery",
    "DifferenceGather",
    "Done",
    "Landing",
    "Memory",
    "Messages",
    "PayloadReducer",
    "Pending",
    "Piece",
    "Plan",
    "PowerSGDReducer",
    "Reducer",
    "StepClock",
    "TwoLevelReducer",
    "cosine_with_truth",
    "exchange",
    "link_seconds",
    "make_plans",
    "start_exchange",
    "true_sum",
]
