"""A simulated inference engine without a world around it: no clock, no I/O, no dice.

`engine.EngineSim` is the model of time; the HTTP server (`agents.simserver`) and a
discrete-event simulator drive the same class. `profiles` say how fast which GPU is, `tokens`
and `answers` stand for the tokenizer and the model.
"""
