"""Certificates for servers on loopback."""

import ssl
import subprocess
from pathlib import Path


def server_and_client_context(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server for 127.0.0.1 and of a client that trusts it. The certificate is made in `folder`."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1".split()
    subject = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1".split()
    subprocess.run([*command, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)
