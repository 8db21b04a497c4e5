-- Who waits, as of one instant.
--
-- KEYS: queue
-- ARGV: prefix
-- Returns: {now (ms), {{model, first arrival (ms), {ticket, JSON, …}}, …}}
-- Emits: nothing
-- @include now_ms
-- @include queue_facts
return { now_ms, queue_facts() }
