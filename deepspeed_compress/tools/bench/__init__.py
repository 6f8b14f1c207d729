"""`ds-compress bench`: what a training step, a message and a kernel cost here, and on emulated slow networks.

options                    the command line
links, hosts               emulated hosts
step, step_rank            training steps: the command, and what its processes do
step_results               their tables and bars
workload, systems, peers   what is measured side by side
comm, comm_rank            messages
kernels                    kernels
rows, gauges               what they share
"""
