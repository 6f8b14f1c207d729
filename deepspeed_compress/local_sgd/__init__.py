"""Local SGD (DiLoCo): islands train alone for many steps, and then exchange the changes of their weights.

    exchange                one exchange: send an update, receive the mean, move the anchor
    fixed_exchange          exchanges among the fixed islands of one job
    elastic_exchange        exchanges in rounds among islands that join and leave
    asynchronous_exchange   exchanges with a parameter server
    deepspeed               islands whose ranks train with DeepSpeed
    coordinator             membership and rounds of islands that join and leave
    parameter_server        the anchor of asynchronous islands

Douillard et al., arXiv 2311.08105.
"""
