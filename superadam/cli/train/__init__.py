"""`superadam train`: a small real trainer that shows the optimizer at work and checks every bit of it.

One module for each noun: `settings` (what a run is), `plain` (records out of files), `presets` (shapes by name), `text`
(what it learns from), `layers`, `llama` and `model` (what is trained), `device` (where), `loop` (one step),
`verification` (the reference beside it), `history` (what happened), `memory` (what it took), `checkpoint`, `report`,
`picture`, `files`, `interruption`, `display` (what the person sees), `session` (a process's work on a run), `command`
(what they type).
"""
