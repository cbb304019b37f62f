// Slots on a canvas: 1,600 patterned elements are too many for the browser to lay out and paint in every
// frame. The grid's elements handle pointers, keys and screen readers, and paint nothing. Static slots are on
// one canvas, moving ones on a second canvas above it.

const FLY_MS = 420;
const MOST_FLIGHTS = 80; // at a time; more would be a blur
const MOST_SPRITES = 2_000;

export class Painter {
  constructor(parent) {
    [this.base, this.over] = ["slots", "flights"].map((name) => {
      const canvas = document.createElement("canvas");
      canvas.className = name;
      canvas.setAttribute("aria-hidden", "true");
      parent.append(canvas);
      return canvas.getContext("2d");
    });
    this.sprites = new Map();
    this.flights = new Map(); // "x y" of the target -> flight
    this.running = false;
  }

  // Set the sizes, in CSS px, and clear everything.
  measure(width, height, slot) {
    this.width = width;
    this.height = height;
    this.slot = slot;
    this.ratio = devicePixelRatio || 1;
    for (const { canvas } of [this.base, this.over]) {
      canvas.width = Math.ceil(width * this.ratio);
      canvas.height = Math.ceil(height * this.ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.base.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.over.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.restyle();
  }

  restyle() {
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    this.sprites.clear();
    this.flights.clear();
  }

  clear() {
    this.base.clearRect(0, 0, this.width, this.height);
  }

  // Draw a slot's content: null, or { kind, letter, label, version, done }.
  put(x, y, look) {
    this.flights.delete(`${x} ${y}`);
    this.#stamp(x, y, look);
  }

  // Like `put`, animated from a point or by fading in. Returns false if too many flights are active.
  fly(x, y, look, from) {
    if (this.flights.size >= MOST_FLIGHTS) return false;
    this.#stamp(x, y, null);
    this.flights.set(`${x} ${y}`, { x, y, look, from, start: null });
    this.#run();
    return true;
  }

  // Animate out to the right, fading.
  leave(x, y, look) {
    if (this.flights.size >= MOST_FLIGHTS) return;
    this.flights.set(`leave ${x} ${y}`, { x: x + 60, y, look, from: [x, y], start: null, gone: true });
    this.#run();
  }

  #stamp(x, y, look) {
    this.base.clearRect(x - 1, y - 1, this.slot + 2, this.slot + 2);
    this.base.drawImage(this.#sprite(look), x - 1, y - 1, this.slot + 2, this.slot + 2);
  }

  #run() {
    if (this.running) return;
    this.running = true;
    const frame = (now) => {
      this.over.clearRect(0, 0, this.width, this.height);
      for (const [key, flight] of this.flights) this.#step(key, flight, now);
      this.running = this.flights.size > 0;
      if (this.running) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  #step(key, flight, now) {
    flight.start ??= now;
    const done = Math.min(1, (now - flight.start) / FLY_MS);
    const { x, y, look, from, gone } = flight;
    if (done === 1) {
      this.flights.delete(key);
      if (!gone) this.#stamp(x, y, look);
      return;
    }
    const eased = 1 - (1 - done) ** 3;
    const size = this.slot + 2;
    const scale = from ? 1 : 0.3 + 0.7 * eased;
    const left = from ? from[0] + (x - from[0]) * eased : x;
    const top = from ? from[1] + (y - from[1]) * eased : y;
    const inset = (size * (1 - scale)) / 2;
    this.over.globalAlpha = gone ? 1 - eased : from ? 1 : eased;
    this.over.drawImage(this.#sprite(look), left - 1 + inset, top - 1 + inset, size * scale, size * scale);
    this.over.globalAlpha = 1;
  }

  // ---- appearance of a slot --------------------------------------------------------------------------

  #sprite(look) {
    const small = this.slot < 26;
    const key = look ? `${look.kind} ${small ? "" : look.label} ${look.version} ${Math.round(look.done * 16)}` : "";
    let sprite = this.sprites.get(key);
    if (!sprite) {
      if (this.sprites.size >= MOST_SPRITES) this.sprites.clear();
      sprite = document.createElement("canvas");
      sprite.width = sprite.height = Math.ceil((this.slot + 2) * this.ratio);
      const pen = sprite.getContext("2d");
      pen.scale(this.ratio, this.ratio);
      pen.translate(1, 1);
      if (look) this.#drawLook(pen, look);
      else this.#drawHole(pen);
      this.sprites.set(key, sprite);
    }
    return sprite;
  }

  #outline(pen) {
    const radius = this.slot >= 44 ? 7 : this.slot >= 26 ? 5 : 3;
    pen.beginPath();
    pen.roundRect(0.75, 0.75, this.slot - 1.5, this.slot - 1.5, radius);
  }

  #drawHole(pen) {
    this.#outline(pen);
    pen.fillStyle = this.color("hole");
    pen.fill();
    pen.strokeStyle = this.color("hole-line");
    pen.setLineDash(this.slot >= 26 ? [4, 3] : [2, 2]);
    pen.stroke();
  }

  #drawLook(pen, look) {
    this.#outline(pen);
    pen.fillStyle = this.color(look.kind);
    pen.fill();
    pen.save();
    pen.clip();
    if (look.kind === "reserved") this.#hatch(pen, look.done);
    if (look.kind === "training") this.#dots(pen);
    pen.restore();
    if (look.kind === "reserved") {
      pen.strokeStyle = this.color("reserved-line");
      pen.lineWidth = 1.5;
      pen.stroke();
    }
    pen.fillStyle = this.color(`${look.kind}-ink`);
    this.#write(pen, look);
  }

  // Hatched, with a bar at the bottom for the share of complete members.
  #hatch(pen, done) {
    const { slot } = this;
    pen.strokeStyle = this.color("reserved-hatch");
    pen.lineWidth = 3;
    pen.beginPath();
    for (let at = -slot; at < slot; at += 9) {
      pen.moveTo(at, slot);
      pen.lineTo(at + slot, 0);
    }
    pen.stroke();
    pen.fillStyle = this.color("reserved-line");
    pen.fillRect(0, slot - 5, slot * done, 5);
    this.#outline(pen);
  }

  #dots(pen) {
    pen.fillStyle = this.color("training-dot");
    for (let x = 4; x < this.slot; x += 7) {
      for (let y = 4; y < this.slot; y += 7) pen.fillRect(x, y, 2, 2);
    }
  }

  #write(pen, { letter, label, version }) {
    const { slot } = this;
    const font = (weight, size) => `${weight} ${size}px system-ui, "DejaVu Sans", sans-serif`;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const middle = slot / 2;
    if (slot < 26) {
      pen.font = font(700, 9);
      pen.fillText(letter, middle, middle + 0.5);
      return;
    }
    if (slot < 44) {
      pen.font = font(650, slot < 34 ? 9 : 11);
      pen.fillText(label, middle, middle, slot - 4);
      return;
    }
    pen.font = font(650, 15);
    pen.fillText(label, middle, middle + 3, slot - 6);
    pen.font = font(700, 9);
    pen.textAlign = "left";
    pen.fillText(letter, 5, 9);
    pen.textAlign = "right";
    pen.fillText(version, slot - 5, 9);
  }
}
