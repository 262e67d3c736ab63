"""Folders of checkpoints, and their manifests, before anybody trusts them.

ownership          which folders flow.save has made: these alone are removed, and how
manifest_fields    what each field of a manifest has to be
"""
