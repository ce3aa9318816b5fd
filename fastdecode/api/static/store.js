// What the browser keeps of the page, as JSON. Where it forbids that, nothing is found and nothing is kept.

class Store {
  constructor(name) {
    this.name = `${name}Storage`;
  }

  /** The value of a key; null if there is none, or no JSON. */
  read(key) {
    try {
      return JSON.parse(window[this.name].getItem(key));
    } catch {
      return null;
    }
  }

  /** Whether there was room for the value. */
  write(key, value) {
    try {
      window[this.name].setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  remove(key) {
    try {
      window[this.name].removeItem(key);
    } catch {
      // There is nothing to remove.
    }
  }

  keys() {
    try {
      return Object.keys(window[this.name]);
    } catch {
      return [];
    }
  }
}

export const browser = new Store("local"); // for all tabs
export const tab = new Store("session"); // for this tab, until it is closed
