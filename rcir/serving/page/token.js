// The question for the server's token.

const dialog = document.getElementById("token-dialog");
const form = document.getElementById("token-form");
const field = document.getElementById("token");

/** The token that is typed, or null if the question is dismissed. */
export function askToken(again) {
  document.getElementById("token-words").textContent = again
    ? "The server refused that token. Enter the right one."
    : "This server requires a token.";
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let token = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      token = field.value;
      dialog.close();
    };
    dialog.onclose = () => resolve(token);
  });
}

document.getElementById("token-cancel").addEventListener("click", () => dialog.close());
