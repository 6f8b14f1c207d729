"""Training program behind launch/train_gpt.py.

options      the command line
ranks        operations of all processes of a run: agreeing on errors, doing work once per node
data         conversion of text into token windows
setup        data, model and engine, built from the options
stepper      one optimizer step and one evaluation, on plain and pipeline engines
loop         steps, evaluations, log lines, checkpoints, and exact resuming
output       metrics.jsonl, and the figures of summary.json
main         the whole program, and the model as a Hugging Face directory
"""
