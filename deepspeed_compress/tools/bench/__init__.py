"""`ds-compress bench`: the cost of training steps, messages and kernels, on this network and on emulated slow ones.

options                    the command line
links, hosts               emulated hosts
step, step_rank            training steps: the command, and the program of its ranks
step_results               tables and bars of training steps
workload, systems          the systems that are compared
peers, torch_loop, megatron
                           training without DeepSpeed
traces                     traces of steps under a profiler
mirror                     a process group whose other ranks mirror this one
comm, comm_rank            collectives: the command, and the program of its ranks
kernels, moved_bytes       compression kernels
probe_rank                 probes of `plan cluster --measure`
jobs, rows, gauges         shared: ranks that run jobs, documents of rows, and what ranks measure with
"""
