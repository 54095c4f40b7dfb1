// Requests to the server, with its token where it wants one.

const TOKEN = "rcir-token";

/** A refused request: the kind of error, the server's words, and what helps. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.message ?? "");
    this.status = status;
    this.kind = body.error;
    this.minimumAlpha = body.minimum_alpha ?? null;
    this.retryAfter = status === 0 || status === 429 || status >= 500;
  }
}

export class Api {
  /** `askToken(again)` gives a token, or null if there will be none. */
  constructor(askToken) {
    this.askToken = askToken;
    this.asking = null;
  }

  async json(path, options) {
    const response = await this.send(path, options);
    let body;
    try {
      body = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      body = { error: "unreadable", message: `the answer of status ${response.status} is not JSON` };
      throw new Refused(response.status, body);
    }
    if (!response.ok) throw new Refused(response.status, body);
    return body;
  }

  post(path, fields, signal) {
    const form = fields instanceof FormData;
    return this.json(path, {
      method: "POST",
      body: form ? fields : JSON.stringify(fields),
      headers: form ? {} : { "content-type": "application/json" },
      signal,
    });
  }

  async send(path, options = {}) {
    for (;;) {
      const token = sessionStorage.getItem(TOKEN);
      const bearer = token === null ? {} : { authorization: `Bearer ${token}` };
      let response;
      try {
        response = await fetch(path, { ...options, headers: { ...options.headers, ...bearer } });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Refused(0, { error: "away" });
      }
      if (response.status !== 401) return response;
      await this.newToken(token);
    }
  }

  /** Wait for a token other than the refused one; many requests ask once. */
  async newToken(refused) {
    if (sessionStorage.getItem(TOKEN) !== refused) return;
    this.asking ??= this.askToken(refused !== null).finally(() => {
      this.asking = null;
    });
    const token = await this.asking;
    if (token === null) throw new Refused(401, { error: "unauthorized" });
    sessionStorage.setItem(TOKEN, token);
  }
}
