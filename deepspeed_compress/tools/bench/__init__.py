"""`ds-compress bench`: the cost of training steps, messages and kernels, on this network and on emulated slow ones.

options                    the command line
links, hosts               emulated hosts
step, step_rank            training steps: the command, and the program of its processes
step_results               their tables and bars
workload, systems          the systems that are compared
peers, torch_loop, megatron
                           training without DeepSpeed
traces                     traces of steps
mirror                     a process group whose other ranks mirror this one
comm, comm_rank            messages
kernels, moved_bytes       kernels
rows, gauges               shared parts
"""
