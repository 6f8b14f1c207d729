"""The only code that communicates: compressed reduce-scatter, all-reduce and all-gather of flat buckets."""

from deepspeed_compress.communication.clipping import ClippingReducer
from deepspeed_compress.communication.contracts import (
    Delivery,
    Done,
    Landing,
    Memory,
    Messages,
    Pending,
    Reducer,
    StepClock,
)
from deepspeed_compress.communication.exchange import exchange, start_exchange
from deepspeed_compress.communication.gather import DifferenceGather
from deepspeed_compress.communication.link import link_seconds
from deepspeed_compress.communication.payload import PayloadReducer
from deepspeed_compress.communication.plan import Piece, Plan, make_plans
from deepspeed_compress.communication.powersgd import PowerSGDReducer
from deepspeed_compress.communication.probe import cosine_with_truth, true_sum
from deepspeed_compress.communication.two_level import TwoLevelReducer

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
