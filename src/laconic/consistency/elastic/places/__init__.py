"""Where workers meet, one file each: a folder, etcd, or a server of our own (`laconic meet`)."""

from laconic.consistency.elastic.places.base import MeetingPlace, open_place

__all__ = ["MeetingPlace", "open_place"]
