"""The training program behind launch/train_gpt.py.

options      the command line
ranks        operations of all processes of a run: agree on errors, do work once per node
data         text in, token windows out
setup        data, model and engine from the options
stepper      one optimizer step, one evaluation: plain and pipeline engines
loop         steps, evaluations, log lines and checkpoints; exact resuming
output       metrics.jsonl, summary.json, progress on a terminal
export       text from the trained model, and the model as a Hugging Face directory
main         the whole program
"""
