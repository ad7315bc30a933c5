"""Synchronous training that goes on when workers come, go, stop or are killed, the coordinator included.

`job` is what users see. Below it: `meeting` (the folder where workers meet, and the numbered views that fence zombies),
`messages` and `line` (what members say, and how), `joining` (how a worker comes in), `membership` (who is in, and one
model for all of them), `group` (a step that all or none have made), `ways` (what can be agreed on), `work` (what a
worker does between two agreements), `wire` and `coded` (how what it offers travels, and their mean in a fixed
order), `deadline` (how long to wait), `replica` (everything that is trained).
"""
