"""The training program behind launch/train_gpt.py.

options      the command line
ranks        what the processes of a run do together: agree on errors, do work once per node
setup        data, model and engine from the options
stepper      one optimizer step, one evaluation: plain and pipeline engines
checkpoint   saving, and resuming exactly
loop         steps, evaluations, log lines
records      metrics.jsonl and summary.json
progress     progress bars on a terminal, plain lines elsewhere
sample       text from the trained model
export       the trained model as a Hugging Face directory
main         the whole program
"""
