"""TLS against a real server, with certificates made on the spot."""

from __future__ import annotations

import logging
import shutil
import subprocess

import pytest

from flexkv_core import Status, TierAccessError, TierTimeoutError, TierUnavailableError
from tests.support.redis_server import RedisServer, buffer, free_port, key, value
from tests.support.waiting import CHILD_S

SUBJECT_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """An authority, a server's and a client's certificate, and another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("pki")
    for name in ("ca", "other"):
        _openssl(
            folder, "req", "-x509", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"
        )
    for name in ("server", "client"):
        _openssl(folder, "req", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "names").write_text(SUBJECT_NAMES)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return folder


def _openssl(folder, verb, *options):
    key_options = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes") if verb == "req" else ()
    command = ["openssl", verb, *key_options, *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=CHILD_S)


@pytest.fixture(scope="module")
def secure(tmp_path_factory, pki):
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "optional", "--bind", "127.0.0.1", "127.0.0.2"]
    options += ["--tls-ca-cert-file", str(pki / "ca.pem")]
    options += ["--tls-cert-file", str(pki / "server.pem"), "--tls-key-file", str(pki / "server.key")]
    with RedisServer(tmp_path_factory.mktemp("tls"), *options) as server:
        server.tls_url = f"rediss://localhost:{port}"
        server.tls_address = f"rediss://127.0.0.2:{port}"  # the certificate does not name it
        yield server


def test_values_cross_whole(secure, pki, open_tier):
    tier = open_tier(secure.tls_url, tls={"ca_file": str(pki / "ca.pem")})
    keys = [key(i) for i in range(8)]
    values = [value(i, 1_000_000 + i) for i in range(8)]
    assert all(o.is_ok for o in tier.store(keys, values))
    into = [buffer() for _ in keys]
    for outcome, got, wanted in zip(tier.load(keys, into), into, values, strict=True):
        assert got[: outcome.num_bytes] == wanted
    assert [o.num_bytes for o in tier.lookup(keys)] == [len(v) for v in values]
    assert all(o.is_ok for o in tier.lookup([key(i % 8) for i in range(1)] + keys[1:]))
    assert tier.load([key(0)], [buffer(1000)])[0].status is Status.CORRUPT
    assert tier.load([key(1)], into[:1])[0].is_ok, "the connection went on being good"


def test_a_client_certificate(secure, pki, open_tier):
    secure.ask("CONFIG", "SET", "tls-auth-clients", "yes")
    try:
        files = {"ca_file": str(pki / "ca.pem")}
        with pytest.raises(TierUnavailableError):
            open_tier(secure.tls_url, tls=files).lookup([key(1)])
        files |= {"cert_file": str(pki / "client.pem"), "key_file": str(pki / "client.key")}
        assert open_tier(secure.tls_url, tls=files).lookup([key(1)])[0].status in (Status.OK, Status.MISS)
    finally:
        secure.ask("CONFIG", "SET", "tls-auth-clients", "optional")


def test_a_foreign_authority_is_not_accepted(secure, pki, open_tier):
    for tls in ({"ca_file": str(pki / "other.pem")}, None):
        with pytest.raises(TierAccessError, match="certificate is not accepted") as caught:
            open_tier(secure.tls_url, tls=tls).lookup([key(1)])
        assert not caught.value.retryable


def test_verification_has_three_grades(secure, pki, open_tier):
    authority = {"ca_file": str(pki / "ca.pem")}
    with pytest.raises(TierAccessError, match="IP address mismatch"):
        open_tier(secure.tls_address, tls=authority).lookup([key(1)])
    open_tier(secure.tls_address, tls=authority | {"verify": "authority"}).lookup([key(1)])
    open_tier(secure.tls_address, tls={"verify": "none"}).lookup([key(1)])


def test_a_server_without_tls(tmp_path, pki, open_tier):
    with RedisServer(tmp_path, port=free_port()) as plain:
        url, tls = f"rediss://localhost:{plain.port}", {"ca_file": str(pki / "ca.pem")}
        tier = open_tier(url, tls=tls, connect_timeout_s=0.3, timeout_s=0.3)
        with pytest.raises(TierTimeoutError, match="does this port speak TLS"):
            tier.lookup([key(1)])
        tier.close()


def test_files_that_are_not_there(secure, open_tier):
    tier = open_tier(secure.tls_url, tls={"ca_file": "/nowhere/ca.pem"})
    with pytest.raises(TierUnavailableError, match="No such file"):
        tier.lookup([key(1)])


def test_the_start_is_told_in_one_line(secure, pki, open_tier, caplog):
    caplog.set_level(logging.INFO)
    open_tier(secure.tls_url, tls={"ca_file": str(pki / "ca.pem")})
    assert f"Redis {secure.ask('INFO')['redis_version']} (master) at {secure.tls_url}" in caplog.text
