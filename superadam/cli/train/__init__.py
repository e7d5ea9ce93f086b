"""`superadam train`: a small real trainer, in one process, that shows the optimizer at work and checks every bit of it.

One module for each noun: `settings` (what a run is), `presets` (models by name), `text` (the training data), `model`
(what is trained), `device` (where), `loop` (one step), `verification` (the reference that runs along), `history`
(records of steps), `checkpoint`, `report`, `picture`, `display` (terminal output), `session` (the order of all this),
`command` (the options).
"""
