-- Takes the next commands for the leader. Reading is fenced too: a paused leader that wakes up can't take what it
-- would never finish.
--
-- KEYS: leader commands
-- ARGV: prefix token limit take_over
--   take_over: 1 for a new leader, which also takes what others took and did not finish
-- Returns: {now (ms), id to wait after, {{id, {field, value, …}}, …}}, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
-- @include now_ms
local function take_new()
  return redis.pcall('XREADGROUP', 'GROUP', 'supervisor', token, 'COUNT', limit, 'STREAMS', commands, '>')
end

local new = take_new()
if new and new.err then -- no such group yet, or Redis lost its data
  redis.call('XGROUP', 'CREATE', commands, 'supervisor', '0', 'MKSTREAM')
  new = take_new()
end
local taken = {}
if take_over == '1' then
  local start = '0-0'
  repeat
    local reply = redis.call('XAUTOCLAIM', commands, 'supervisor', token, 0, start, 'COUNT', 100)
    start = reply[1]
    for _, entry in ipairs(reply[2]) do
      taken[#taken + 1] = entry
    end
  until start == '0-0'
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', commands, 'supervisor')) do
    if consumer[2] ~= token then
      redis.call('XGROUP', 'DELCONSUMER', commands, 'supervisor', consumer[2])
    end
  end
elseif new then
  taken = new[1][2]
end
local newest = redis.call('XREVRANGE', commands, '+', '-', 'COUNT', 1)[1]
return { now_ms, newest and newest[1] or '0-0', taken }
