-- Requires: prefix. Appends a message to a gateway's inbox; each heartbeat of the gateway renews the inbox's life.
local function tell(gateway, ...)
  local inbox = prefix .. 'inbox:' .. gateway
  redis.call('XADD', inbox, 'MAXLEN', '~', 10000, '*', ...)
  redis.call('PEXPIRE', inbox, 600000)
end
