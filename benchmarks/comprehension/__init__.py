"""Code as data: the tasks of `laconic_code` beside controls and published figures."""
