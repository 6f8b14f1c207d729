"""`ds-compress bench`: the cost of training steps, messages and kernels, on this network and on emulated slow ones.

options             the command line
links, hosts        emulated hosts
step, step_rank     training steps: the command, and the program of its ranks
step_results        tables and bars of training steps
workload, systems   the systems that are compared
peers, megatron     training without DeepSpeed
mirror              a process group whose other ranks mirror this one
comm, comm_rank     messages: the command, and the program of its ranks
kernels             compression kernels
probe_rank          probes of `plan cluster --measure`
jobs, gauges        shared: ranks that run jobs and their rows, and what ranks measure with
"""
