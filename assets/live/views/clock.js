// The time axis that stacked pictures share, so that one instant is one vertical line through all of them.

export const WINDOW_S = 30;
export const LEFT = 132; // names, y axis
export const RIGHT = 124; // what is going on now, in words
const TICK_S = 5;

/** Ticks at whole engine seconds, labelled by how long ago they are; they move with the picture. */
export function timeAxis(context, colors, { now, left, width }, top, bottom) {
  context.font = `12px ${colors.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (let ago = 0; ago <= WINDOW_S; ago += TICK_S) {
    const x = Math.round(left + width * (1 - ago / WINDOW_S)) - 0.5;
    context.strokeStyle = colors.line;
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, bottom);
    context.stroke();
    context.fillStyle = colors.muted;
    context.fillText(ago ? `−${ago} s` : "now", x, bottom + 11);
  }
  context.textAlign = "left";
}

/** Index of the first series row after `t`, by bisection: rows are in order of time. */
export function firstAfter(series, t) {
  let low = 0;
  let high = series.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (series[middle][0] <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Columns of a series row, as backend/fold.py writes them.
export const ROW_T = 0;
export const ROW_STEP_S = 1;
export const ROW_PREFILL = 2;
export const ROW_DECODE = 3;
export const ROW_USED = 4;
export const ROW_CACHED = 5;
export const ROW_FILLED = 6;
export const ROW_HELD = 7;
export const ROW_RUNNING = 8;
export const ROW_WAITING = 9;
export const ROW_OUTPUT = 10;
