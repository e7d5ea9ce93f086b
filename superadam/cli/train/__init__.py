"""`superadam train`: a small real trainer that shows the optimizer at work and checks every bit of it.

<<<<<<< HEAD
One module for each noun: `settings` (what a run is), `plain` (records out of files), `presets` (shapes by name), `text`
(what it learns from), `layers`, `llama` and `model` (what is trained), `device` (where), `loop` (one step),
`verification` (the reference beside it), `history` (what happened), `memory` (what it took), `checkpoint`, `report`,
`picture`, `files`, `interruption`, `display` (what the person sees), `session` (a process's work on a run), `command`
(what they type).
=======
One module for each noun: `settings` (what a run is), `presets` (shapes by name), `text` (the training data), `layers`,
`llama` and `model` (what is trained), `device` (where), `loop` (one step), `verification` (the reference that runs
along), `history` (records of steps), `memory` (what a run needs and took), `checkpoint`, `report`, `picture`, `files`,
`interruption`, `display` (terminal output), `session` (one process's work on a run), `command` (the options).
>>>>>>> h-prose2
"""
