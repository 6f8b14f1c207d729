"""`ds-compress bench`: what a training step, a message and a kernel cost here, and on emulated slow networks.

`options`, `command`: the command line. `links`, `hosts`: emulated hosts. `step`, `step_rank`, `step_table`, `workload`,
`subjects`, `peers`: training steps. `comm`, `comm_rank`, `collectives`: messages. `kernels`,
`operations`: kernels. `document`, `launch`, `gauges`, `plots`: what they share.
"""
