-- Refusals: the only way a transition says no. Called while validating, before the first write.
-- The client mirrors every code as a class (roq/errors.py).

local M = {}

local codes = {
  FENCED = true, -- the claim or the trainer was superseded
  NOT_READY = true, -- a step out of order
  NO_RUN = true, -- nothing was created under this name
  NO_GROUP = true, -- no such group was ever issued
  NO_WORKER = true, -- no such worker is attached
  NO_WEIGHTS = true, -- the weights version is not registered
  CONFIG = true, -- the run exists with another configuration
  INVALID = true, -- an argument is missing, malformed or out of range
  STATE_LOST = true, -- the caller is ahead of what the server remembers
  ENDED = true, -- the run is over
}

-- Stop the transition with ROQ_<code> and a sentence that tells the caller what to do.
function M.with(code, message, ...)
  assert(codes[code], code)
  if select("#", ...) > 0 then
    message = string.format(message, ...)
  end
  error({ refusal = "ROQ_" .. code .. " " .. message })
end

return M
