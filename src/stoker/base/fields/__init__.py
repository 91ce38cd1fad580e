"""Declarative tables of fields: which names a request or a configuration may use, what values they take, and what becomes of each.

Protocols of the server use these tables for request bodies, deployment formats for configuration files and environment variables.

- `values`: value types (whole number, text, flag, choice, list, ...). Each checks a typed value and reads the same value from text.
- `table`: one row per field, and the table that finds, checks and documents them.
- `errors`: the error of a value that a type or a row does not accept.
"""
