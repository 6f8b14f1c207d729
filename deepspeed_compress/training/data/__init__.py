"""Conversion of text into token windows: the corpus, the tokenizer, the token cache, and the data of each step.

corpus      the example text, the text files of a run, and the documents in them
tokens      trains and loads a byte-level BPE tokenizer directory, encodes a corpus once into a memory-mapped file, and
            selects the windows that a step reads
"""
