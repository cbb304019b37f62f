-- The trainer's ownership. The newest trainer that asks for a batch owns the run; earlier ones are fenced
-- for good, so a process that was presumed dead cannot overwrite its successor's weights.

local M = {}

local REMEMBERED = 16 -- former trainers that still get FENCED

local function owner(run)
  local values = redis.call("HMGET", run.key.state, "trainer", "former_trainers")
  return values[1] or "", values[2] or ""
end

local function fence(trainer, current)
  refuse.with("FENCED", "trainer %s was superseded by %s; stop it", trainer, current)
end

-- Record that the trainer is alive.
function M.seen(run)
  context.set(run, "trainer_seen", run.now)
end

-- Make this trainer the owner; returns whether it was not before. Refuses one that was superseded.
function M.attach(run, trainer)
  local current, former = owner(run)
  if trainer ~= current then
    if string.find(" " .. former .. " ", " " .. trainer .. " ", 1, true) then
      fence(trainer, current)
    end
    if current ~= "" then
      local names = { current }
      for name in string.gmatch(former, "%S+") do
        if #names == REMEMBERED then
          break
        end
        names[#names + 1] = name
      end
      context.set(run, "former_trainers", table.concat(names, " "))
    end
    context.set(run, "trainer", trainer)
    context.set(run, "stuck_since", nil) -- it starts to wait now
    events.log(run, "trainer_joined", { trainer = trainer })
  end
  M.seen(run)
  return trainer ~= current
end

-- Refuse everyone but the owner.
function M.require(run, trainer)
  local current = owner(run)
  if current == "" then
    refuse.with("NOT_READY", "no trainer has taken a batch yet; call take first")
  elseif trainer ~= current then
    fence(trainer, current)
  end
end

-- The address of the owner's weight sender, or nil. Workers must not be able to write it: other workers receive
-- weights from there.
function M.sender(run)
  return redis.call("HGET", run.key.sender, "address") or nil
end

return M
