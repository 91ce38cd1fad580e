"""Takes the screenshots of docs/console.md from a running server, while requests run.

python scripts/console_screenshots.py http://127.0.0.1:8000/ [--chromium /usr/bin/chromium] [--out docs/images/console]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import async_playwright

TOPICS = ("a lighthouse", "photosynthesis", "the ocean", "the printing press", "congestion control", "autumn", "bees", "bridges")
SYSTEM = "You are a careful assistant. Answer in complete sentences, in plain English, and keep every statement short. " * 3
KINDS = ("report", "story", "search", "summary")
NUM_CLIENTS = 12
SIZE = {"width": 1200, "height": 800}


async def run_client(url: str, number: int) -> None:
    """Request answers without a pause."""
    rng = random.Random(number)
    async with httpx.AsyncClient(timeout=300) as http:
        while True:
            user = f"Write about {rng.choice(TOPICS)}. " + "Use many details. " * rng.randint(1, 25)
            body = {
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
                "max_tokens": rng.randint(20, 160),
                "request_id": f"{KINDS[number % len(KINDS)]}-{rng.randint(100, 999)}",
            }
            await http.post(url + "v1/chat/completions", json=body)


async def take_chat(page: Any) -> None:
    """An answer with the probability of a token that was not certain."""
    await page.get_by_label("Token probabilities").check()
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_label("Maximum new tokens").fill("60")
    await page.get_by_label("Message", exact=True).fill("What is the capital of Japan, and what is it known for?")
    await page.keyboard.press("Enter")
    await page.get_by_label("Model", exact=True).get_by_text("new tokens").wait_for()
    await page.locator(".tokens .p3, .tokens .p2").first.hover()


async def take(url: str, chromium: str, out: Path) -> None:
    """Write the screenshots to `out`."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(120_000)
        await page.goto(url)
        await take_chat(page)
        await page.screenshot(path=out / "chat.png")
        clients = [asyncio.create_task(run_client(url, number)) for number in range(NUM_CLIENTS)]
        for name, seconds in (("Live", 40), ("Timeline", 20), ("Models", 3)):
            await page.get_by_role("tab", name=name).click()
            await asyncio.sleep(seconds)
            if name == "Timeline":
                box = await page.get_by_role("application").bounding_box()
                await page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5)
            await page.screenshot(path=out / f"{name.lower()}.png", full_page=name == "Models")
        phone = await browser.new_page(viewport={"width": 390, "height": 760}, color_scheme="dark")
        await phone.goto(f"{url}#live")
        await asyncio.sleep(15)
        await phone.screenshot(path=out / "phone-dark.png")
        for client in clients:
            client.cancel()
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="with a slash at the end")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images" / "console")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(args.url, args.chromium, args.out))


if __name__ == "__main__":
    main()
