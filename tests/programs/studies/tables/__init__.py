"""Tables made of many runs of the twin: declared as cases, played once, kept by content.

Data flows one way. A table's module declares `Case`s (`case`); `plays` runs those whose results
are not on disk yet, two at a time, and keeps them (`result_files`, keyed by the case and by
the code that it depends on: `fingerprint`); `figures` reads numbers from results, and `markdown`
writes rows. A run that was interrupted therefore goes on where it stopped, and after a change of
one policy only that policy's rows are played again.
"""
