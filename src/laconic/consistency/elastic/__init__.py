"""Synchronous training that goes on when workers come, go, stop or are killed, the coordinator included.

`door` is `laconic.elastic`, `job` what it returns. Below it: `meeting` (the numbered views that fence zombies) at
one of `places/` (a folder, etcd, `laconic meet`), `line` and `watch` (what members say, and who is lost),
`reachability` (who is cut off), `outage` (a place that does not answer), `membership` (how a worker comes in, and one
model for all), `group` (a step that all or none have made), `messages` (what members say), `vectors` and `coded` (how
what is offered travels), `replica` (everything that is trained, and the work between two agreements), `options` (what
users say, and how long to wait).
"""
