"""Synchronous training that continues when workers join, leave, hang or die, the coordinator included.

`door` is `laconic.elastic`, `job` what it returns. Below it: `meeting` (the numbered views that fence zombies) at
one of `places/` (a folder, etcd, `laconic meet`), `line` and `watch` (messages, and lost members),
`reachability` (which side of a broken network is cut off), `outage` (a place that does not answer), `membership` (how
a worker joins, and one model for all), `group` (commits a step on all members or on none), `messages` (what members
send), `vectors` and `coded` (how vectors travel), `replica` (the trained state, and the work between two agreements),
`options` (the user's options and the deadlines).
"""
