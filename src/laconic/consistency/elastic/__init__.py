"""Synchronous training that goes on when workers come, go, stop or are killed, the coordinator included.

`door` is `laconic.elastic`, `job` what it returns. Below it: `meeting` (the folder where workers meet, and the numbered
views that fence zombies), `line` and `watch` (what members say, and who is lost), `reachability` (who is cut off),
`outage` (a folder that cannot be written to), `membership` (how a worker comes in, and one model for all), `group` (a
step that all or none have made), `messages` (what members say), `vectors` and `coded` (how what is offered
travels), `replica` (everything that is trained, and the work between two agreements), `options` (what users say, and
how long to wait).
"""
