"""The object store and everything that is kept in it: one module per kind of object.

Importing this package imports nothing else; the Google client is imported only when a `gs://`
store is opened.
"""
