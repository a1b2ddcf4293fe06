"""The language of the bus: ids, subjects, messages. No behaviour, no I/O.

Everything two processes must agree on stands here once. Import the modules by name
(`from schemas import subjects`): a reader then sees where a word comes from.
"""
