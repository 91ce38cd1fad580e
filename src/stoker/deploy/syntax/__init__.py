"""Readers and writers of the file syntaxes of deployment formats, with line numbers."""
