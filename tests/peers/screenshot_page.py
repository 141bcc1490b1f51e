"""The page of a running server in a real browser: ask, look, and keep pictures. Debian's chromium-driver must be there.

``kvproof serve --num-gpu-blocks-override 66 --max-model-len 1024 --max-num-seqs 6`` in one terminal, and in another
``python -m tests.peers.screenshot_page http://127.0.0.1:8000/ FOLDER``. It types a question with the keyboard alone, waits
for the answer, and fails if there is none, if the map is not live, or if the browser's console has a line.
"""

import base64
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PORT = 19515
ENTER = "\ue007"
LOOKS = {"light": (1200, 830, "light"), "dark": (1200, 830, "dark"), "narrow": (390, 844, "light")}


def command(method: str, path: str, body: object = None) -> Any:
    """What the driver answers. Raises ``RuntimeError`` if it refuses."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=180)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())["value"]
    if isinstance(answer, dict) and "error" in answer:
        raise RuntimeError(answer["message"])
    return answer


def look(url: str, folder: Path, name: str, width: int, height: int, scheme: str) -> None:
    """One session: ask by keyboard, wait for the end, keep the picture."""
    chrome = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu"], "binary": "/usr/bin/chromium"}
    wanted = {"alwaysMatch": {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}}
    here = f"/session/{command('POST', '/session', {'capabilities': wanted})['sessionId']}"

    def devtools(cmd: str, params: object) -> None:
        command("POST", f"{here}/goog/cdp/execute", {"cmd": cmd, "params": params})

    def text(identifier: str) -> str:
        script = "return document.getElementById(arguments[0]).textContent"
        return str(command("POST", f"{here}/execute/sync", {"script": script, "args": [identifier]}))

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    devtools("Emulation.setDeviceMetricsOverride", size)
    devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    command("POST", f"{here}/url", {"url": url})
    [question] = command("POST", f"{here}/element", {"using": "css selector", "value": "#question"}).values()
    command("POST", f"{here}/element/{question}/value", {"text": f"What is the capital of France?{ENTER}"})
    deadline = time.monotonic() + 120
    while "of answer" not in text("status"):
        assert time.monotonic() < deadline, text("status")
        time.sleep(0.2)
    assert text("link").startswith("Live") and "Requests that run" in text("words"), text("link")
    (folder / f"page-{name}.png").write_bytes(base64.b64decode(command("GET", f"{here}/screenshot")))
    assert command("POST", f"{here}/se/log", {"type": "browser"}) == []
    print(f"{name}: {text('status')} {text('words')}")
    command("DELETE", here)


def main(url: str, folder: Path) -> None:
    driver = subprocess.Popen(["chromedriver", f"--port={PORT}"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(2)
        for name, (width, height, scheme) in LOOKS.items():
            look(url, folder, name, width, height, scheme)
    finally:
        driver.terminate()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
