"""Certificates for mutual TLS, made by openssl."""

import subprocess

from jasgd import runtime


def _openssl(*arguments):
  subprocess.run(
    ['openssl', *map(str, arguments)],
    check=True,
    capture_output=True,
    timeout=60,
  )


def make_authority(folder, name):
  """An authority, and the certificates of a server and of a client."""
  folder = folder / name
  folder.mkdir()
  authority, authority_key = folder / 'authority.pem', folder / 'authority.key'
  curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1']
  _openssl(
    *['req', '-x509', *curve, '-nodes', '-days', '2', '-subj', f'/CN={name}'],
    *['-keyout', authority_key, '-out', authority],
  )
  extensions = folder / 'extensions'
  extensions.write_text('subjectAltName=IP:127.0.0.1,DNS:localhost\n')
  request, certificate, key = (
    folder / f'own.{kind}' for kind in ('csr', 'pem', 'key')
  )
  _openssl(
    *['req', *curve, '-nodes', '-subj', '/CN=127.0.0.1'],
    *['-keyout', key, '-out', request],
  )
  _openssl(
    *['x509', '-req', '-in', request, '-CA', authority, '-CAkey'],
    *[authority_key, '-CAcreateserial', '-days', '2', '-extfile', extensions],
    *['-out', certificate],
  )
  return runtime.Tls(certificate, key, authority)
