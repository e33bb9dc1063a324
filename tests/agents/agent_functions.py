"""Agents whose flow graphs are tested. They are not run."""

# ruff: noqa: F821, RET503
# mypy: ignore-errors

from __future__ import annotations


async def bug_repair(bug):
    """Agent of Hive's figure 6."""
    gather = spawn(context_gather, bug)
    while True:
        code = await next(gather)
        patch = await chat.gen(code)
        await resume(gather, patch)
        if passes(patch):
            return patch


async def context_gather(bug):
    """Agent of Hive's figure 6."""
    while True:
        yield gather_code(bug)


async def calls(chat, other):
    """Calls of all kinds, some of them not suspension points."""
    chat.user(next(iter("abc")))
    first = chat.gen()
    await asyncio.gather(chat.gen(n=await count()), other.gen(forkable=False))
    child = await agents.spawn(calls, chat)
    await resume(child, await next(child))
    later = lambda: spawn(calls)  # noqa: E731

    async def inner():
        await hidden()

    found = {await key(): await value()}
    await agents.tool(web.search, found, retries=2)
    return first, later, inner, await tool(lambda: 3)


async def branches(x):
    """Branches in statements and expressions."""
    if await test(x):
        await yes()
    elif x:
        await maybe()
    y = await left() if x else await right()
    z = x and await second() or await third()
    match await subject(y, z):
        case 1 if await guard():
            await one()
        case [*_]:
            return
        case _:
            await other()
    await last()


async def loops(items):
    """Loops with `break`, `continue` and `else`."""
    for item in await listed(items):
        if item is None:
            continue
        if await found(item):
            break
    else:
        await missing()
    while await more():
        async for part in stream():
            await use(part)


async def comprehensions(items):
    """Loops within expressions."""
    return [await f(x) async for x in stream() if await good(x)] + [await g(x, y) for x in items for y in x]


async def exceptions():
    """Handlers, and a `finally` on the way out."""
    try:
        await body()
        if await check():
            raise KeyError
    except TimeoutError:
        await late()
    else:
        await fine()
    finally:
        await close()
    await after()


async def plain_code_raises(text):
    """The code before the first suspension point fails."""
    try:
        number = int(text)
        await use(number)
    except Exception:
        await ask()


async def returns_through(lock):
    """A body that never ends by itself."""
    async with lock:
        return await work()
    await unreachable()


def hostile(text='</text><script>"&\x00'):
    """Text in the source that is no XML."""
    yield '</svg>"&'
