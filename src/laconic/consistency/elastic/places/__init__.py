"""Where workers meet, one file each: a folder, etcd, or a server of our own (`laconic meet`)."""

from laconic.consistency.elastic.places.base import Place, open_place

__all__ = ["Place", "open_place"]
