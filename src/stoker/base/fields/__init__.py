"""Declarative tables of fields: the names that a request or a configuration may use, and how each value is checked and used.

Protocols of the server use these tables for request bodies, deployment formats for configuration files and environment variables.

- `values`: value types (whole number, text, flag, choice, list, ...). Each checks a typed value and reads the same value from text.
- `table`: one row per field, and the table that finds, checks and documents them.
- `errors`: the error of a value that a type or a row does not accept.
"""
