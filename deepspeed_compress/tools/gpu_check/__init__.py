"""`python -m deepspeed_compress.tools.gpu_check`: check this machine's GPU with one command and one table.

options, command           the command line; parts one after the other
parts, part                the table of parts, each a process with a time limit; the program of that process
findings, table            what a part found, as JSON and on the terminal
wheels                     packages from a directory
kernels, operations, compared
                           part 1: kernels against plain torch
speed                      part 2
synchronisation, exchanges, mirror
                           part 3, and a process group whose other ranks only mirror this one
sanitizer                  part 4
ranks, workload            processes that train, and what they train
steps, torture             part 5
profile                    part 6
language_model             part 7
"""
