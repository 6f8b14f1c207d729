"""Local SGD (DiLoCo): islands train alone for many steps, and then exchange the changes of their weights.

exchange, elastic_exchange, asynchronous_exchange   exchanges among a fixed set of islands, among islands that join
                                                    and leave, and with a parameter server
deepspeed           islands whose ranks train with DeepSpeed
coordinator         membership and rounds of islands that join and leave
parameter_server    the anchor of asynchronous islands
"""
