"""A simulated inference engine without a world around it: no clock, no I/O, no dice.

`engine.EngineSim` is the model of time; the HTTP server (`agents.simserver`) and a
discrete-event simulator drive the same class. `profiles` hold the speed of each GPU, `text`
simulates the tokenizer and the model's answers.
"""
