"""The built-in storyteller: its text, its tokenizer, its training and its examination.

Run the parts as modules, with the folder `scripts` on PYTHONPATH: `python -m storyteller.data --help`.
"""
