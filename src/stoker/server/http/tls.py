"""HTTPS: a check of the certificate and its key before the server starts."""

from __future__ import annotations

import ssl

from stoker.base.errors import ConfigError
from stoker.server.settings import ServerSettings


def check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError if TLS is set and its certificate and key cannot be read or do not match."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key, _no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        files = f"tls_certificate={settings.tls_certificate} and tls_key={settings.tls_key}"
        cure = "Name PEM files that belong together, the key without a password."
        raise ConfigError(f"{files} are refused: {reason}.", cure=cure) from None


def _no_password() -> str:
    """The password callback for the key. Without it, OpenSSL would read one from the terminal."""
    raise ValueError("the key has a password")
