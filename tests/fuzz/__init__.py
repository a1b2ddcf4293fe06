"""Inputs that nobody meant to send, for every decoder of ours: bus, engines, HTTP, files.

`mutate` makes them of good ones by their grammar: fields of JSON and msgpack, lines, bytes.
`decoders` has each decoder, its good inputs, and the errors that it promises; whatever else it
raises is a fault. `make fuzz N=1000000` tries many, `tests/fuzz/test_fuzz.py` a few.
"""
