"""`python -m deepspeed_compress.tools.gpu_check`: what holds on the GPU of this machine, in one command and one table.

options, command           the command line; parts one after the other
parts, part                the table of parts, each a process with a limit; the program of that process
findings, table            what a part found, as JSON and on the terminal
wheels                     packages from a directory
kernels, operations, compared
                           part 1: kernels against plain torch
speed                      part 2
synchronisation, exchanges, mirror
                           part 3, and a second rank that is there in name only
sanitizer                  part 4
ranks, workload            processes that train, and what
steps, torture             part 5
profile                    part 6
language_model             part 7
"""
