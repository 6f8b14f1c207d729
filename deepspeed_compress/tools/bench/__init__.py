"""`ds-compress bench`: the cost of training steps, messages and kernels, on this network and on emulated slow ones.

options             the command line
links, hosts        emulated hosts
jobs                ranks that run jobs, and the rows of these
step, comm, kernels the commands
rank, step_rank     the program of ranks: messages and probes, and training steps
gauges              what ranks measure with
workload, systems   the systems that are compared
peers               training without DeepSpeed
mirror              a process group whose other ranks mirror this one
"""
